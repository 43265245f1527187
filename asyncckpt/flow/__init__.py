"""What runs the pipeline: byte budget, staging buffers, worker threads, the engine's loop."""
