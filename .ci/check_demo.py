"""What the demo must show: all six tables open, and every tier's fine-tuned model is at least 90 % right."""

import sys

import pandas as pd

TABLES = ("runs", "rounds", "clients", "candidates", "evaluations", "models")

tables = {name: pd.read_parquet(f"results/{name}") for name in TABLES}
assert all(len(table) for table in tables.values()), "a table is empty"
run = tables["runs"].sort_values("started").run_id.iloc[-1]
test = tables["evaluations"].query("stage == 'evaluation' and split == 'test' and metric == 'accuracy'")
accuracy = test[(test.run_id == run) & test.client_id.isna()].pivot_table(index="tier", columns="model", values="value")
worst = accuracy["fine_tuned"].min()
sys.stdout.write(f"{accuracy.to_string()}\nworst fine-tuned tier: {worst:.4f}\n")
assert len(accuracy) == 4, "there are four tiers"
assert worst >= 0.9, f"a fine-tuned tier is at {worst:.4f}"
