"""On-policy distillation with SAKI in JAX (arXiv 2609.36601).

The letters used for shapes everywhere in this package:

    B   rows of a batch                   V   vocabulary
    P   prompt length                     D   model width
    T   response length                   L   layers
    S   cache length (slots)              H   query heads
    K   draft block                       G   key/value heads
    N   prompts of a step                 C   head dimension
    M   samples a prompt                  W   slots, the rows in generation
    R   prompts prefilled together        *B  any leading axes

and the names of the paper: ``log_p`` the student, ``log_t`` the teacher, ``log_q`` the bridge
between them, ``beta`` its interpolation weight, ``epsilon`` the KL budget, ``corrected`` the
positions at which the coupling replaced the student's proposal, ``teacher_mode`` the teacher's top
token there.

Importing the package touches no device.
"""

import os

# transformers is here for tokenizers alone and would print that it found no torch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"
