"""What runs inside the training process. Imports nothing by itself; ``gpuwatch.attach`` is the door."""
