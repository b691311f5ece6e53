"""What goes over the wire: one file per endpoint's request and answer. Knows no engine."""
