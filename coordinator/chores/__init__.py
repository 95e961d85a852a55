"""What one process does for all: trimming, reaping, repairing, applying events."""
