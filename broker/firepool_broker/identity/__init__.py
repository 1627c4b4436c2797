"""Who calls: identities and the tokens that prove them."""
