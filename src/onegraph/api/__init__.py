"""What a program calls: a model that answers, a checkpoint made smaller. `onegraph` hands these names out lazily."""
