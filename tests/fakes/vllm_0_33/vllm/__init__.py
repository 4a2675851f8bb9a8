"""A fake of vLLM 0.33: names and signatures are the real package's, bodies the shortest that are correct."""
