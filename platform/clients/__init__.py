"""Client tasks (training, scoring) and the workers that execute them."""
