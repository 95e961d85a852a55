"""What requests cost, and the ledger of usage.

prices   what a request costs
hours    the hours of the ledger
windows  the days, weeks and months of budgets
ledger   what this process adds to the ledger
"""
