"""Structure once, weights in seconds: graphs whose weights are symbols, and the writing of weights into them."""
