"""What operators keep in the store: signed records that every gateway knows.

record        one record: its text, its signature, and which of two is the newer one
key_record    an API key, as its record tells it
file_keys     the API keys of the newest configuration file, while gateways have different ones
record_book   the records that this gateway knows, kept like the store's in the background
"""
