"""`deltaline top`: what a server is doing, in a view that is renewed."""
