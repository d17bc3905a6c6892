"""Breaking the server on purpose: faults, walls taken away one by one, and a witness of what attention read.

Nothing of the product imports this package, and no option of the product changes what it checks. The lab drives the
product's own objects by hand and patches them while they run.
"""
