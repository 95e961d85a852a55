"""What a replica's engine says of itself over HTTP."""
