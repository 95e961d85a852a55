"""What one process does for all gateways: trimming, reaping, repairing."""
