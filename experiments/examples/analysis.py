"""Example: the numbers of a paper from result files. Run it in a folder with `results`, cell by cell or as a whole."""

# %% The tables are Parquet: one row per round, with the columns run_id and experiment
import pandas as pd

from fedloom.experiments import analysis

RESULTS = "results"
runs = pd.read_parquet(f"{RESULTS}/runs")
print(runs[["experiment", "run_id", "method", "status"]].to_string(index=False))

rounds = pd.read_parquet(f"{RESULTS}/rounds")
print(rounds.groupby(["run_id", "stage"], observed=True)[["bytes_down", "bytes_up", "wall_s"]].sum())

# %% Means and 95 % intervals over seeds, per configuration, model and tier
tables = analysis.load(RESULTS)  # run_ids=[...] or experiment="..." for some of the runs
summary = analysis.summary(tables)
shown = ["setting", "model", "tier", "seeds", "accuracy_mean", "accuracy_half_width", "macs_mean", "total_bytes_mean"]
print(summary[shown].to_string(index=False))

# %% The distribution of accuracy over clients
fairness = analysis.fairness(tables)
print(fairness[fairness["tier"] == "all"].to_string(index=False))

# %% Communication, and validation accuracy over rounds
print(analysis.communication_by_kind(analysis.communication(tables)).to_string(index=False))
curves = analysis.convergence(tables).query("series == 'validation'")
print(curves.groupby(["kind", "rounds_done"])["metric"].mean().unstack("kind"))

# %% The searches: winners, and the hypervolume of the fronts in the plane of MACs and accuracy
print(analysis.pareto(tables).query("is_winner").to_string(index=False))
print(analysis.hypervolume(tables).to_string(index=False))

# %% Comparison of the values of one configuration key, tested over seeds, if the runs differ in it
KEY = "method.train.weighting"
try:
    print(analysis.compare(tables, by=KEY).to_string(index=False))
except ValueError as reason:
    print(f"no comparison: {reason}")

# %% A table for a paper
measured = summary.dropna(subset="accuracy_mean")
table = measured.pivot(index=["setting", "model", "subnet"], columns="tier", values="accuracy_mean")
print(table.to_latex(float_format="%.3f", escape=True))
