"""HTTP/1.1 towards clients: connections, and one exchange of request and answer after the other on each."""
