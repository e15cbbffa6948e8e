"""Many configurations measured alike: cells, the processes that measure them, the file they go to."""
