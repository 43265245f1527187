"""What runs the pipeline: the byte budget, staging buffers, worker threads and the engine's loop."""
