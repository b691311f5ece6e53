"""What each kind of head is trained to do: one file per objective."""
