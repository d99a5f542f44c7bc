"""Programs: one step of a cell as data, made of its equations in plain torch."""
