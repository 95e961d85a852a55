"""What requests cost.

prices   what a request costs
"""
