"""Parts of the comparison in the small; the door is replicate_small.py beside this folder."""
