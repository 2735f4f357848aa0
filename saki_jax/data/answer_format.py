r"""How an answer is asked for and where it is looked for: one place for prompts and grader.

The instruction asks for ``\boxed{}``; the grader reads the last command of `BOX_COMMANDS`.
Standard library only, because the grader is.
"""

BOX_COMMANDS = ("\\boxed", "\\fbox")
"""Commands whose argument is an answer. ``\\fbox`` is credited everywhere alike (case M08)."""

INSTRUCTION = f"Please reason step by step, and put your final answer within {BOX_COMMANDS[0]}{{}}."
"""What the paper appends to a question, after one space (Appendix A)."""

THINK_END = "</think>"
"""Closes a reasoning block; only what follows the last one is the answer."""
