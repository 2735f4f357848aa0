"""The parts of scripts/check_accelerator.py."""
