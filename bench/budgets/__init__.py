"""What budgets of tenants let through when gateways die, and what they cost.

python -m bench.budgets      measures both

clients     they spend the budgets of their tenants, and count    cost    Redis' time of a request with budgets
"""
