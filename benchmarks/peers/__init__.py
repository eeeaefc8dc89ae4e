"""vtx beside what others use instead: same checkpoint, same prompt, same threads, one table."""
