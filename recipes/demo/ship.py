def ship(*a): raise NotImplementedError
