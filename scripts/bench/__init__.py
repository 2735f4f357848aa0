"""Parts of the benchmarks; the doors are the scripts beside this folder."""
