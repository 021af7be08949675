"""The figures, in the order of the document: modules of `benchmarks/paper/figures`."""

MODULES = (
    "fig_1",
    "table_1",
    "fig_2_13",
    "fig_12",
    "real",
    "fig_14_15",
    "fig_16",
    "fig_17",
    "fig_18b",
    "fig_19",
    "assumptions",
    "table_4_1",
    "chunks",
    "policies",
    "host_time",
    "block_tables",
    "execution_modes",
    "speculation",
    "replicas",
    "fidelity",
)
