"""What traces cost a gateway."""
