"""`quire port`: what a class for another type of model begins with."""
