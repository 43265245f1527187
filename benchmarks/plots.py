def plot(results: Results, path: Path) -> None:
    """One picture: rates of the large workloads by scenario, with every sample as a dot."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scenarios = [
        s
        for s in (SAVE, WARM, COLD)
        if any(m.scenario == s and m.floor for m in results.measurements)
    ]
    figure = Figure(figsize=(4.2 * max(1, len(scenarios)) + 2.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(1, len(scenarios)), squeeze=False)[0]
    for axis, scenario in zip(axes, scenarios, strict=False):
        found = [m for m in results.measurements if m.scenario == scenario]
        colours = colormaps["tab20" if len(found) > 20 else "tab10"]
        _plot_rates(axis, scenario, found, colours)
    figure.savefig(path, dpi=80)


def _plot_rates(axis: Any, scenario: str, found: list[Measurement], colours: Any) -> None:
    found = [m for m in found if m.floor]
    workloads = list(dict.fromkeys(m.workload for m in found))
    kinds = list(dict.fromkeys((m.subject, m.column) for m in found))
    width = 0.8 / len(kinds)
    for k, (subject, column) in enumerate(kinds):
        for w, workload in enumerate(workloads):
            match = [
                m for m in found if (m.workload, m.subject, m.column) == (workload, subject, column)
            ]
            if not match:
                continue
            rates = [match[0].nbytes / sample.wall_s / 1e9 for sample in match[0].samples]
            at = w + (k - (len(kinds) - 1) / 2) * width
            label = f"{subject}, {column}" if w == 0 else None
            rate = match[0].nbytes / match[0].wall_s / 1e9
            axis.bar(at, rate, width, color=colours(k % colours.N), label=label)
            axis.plot([at] * len(rates), rates, ".", color="black", markersize=3)
    for w, workload in enumerate(workloads):
        floors = [
            m.nbytes / s.floor_s / 1e9
            for m in found
            if m.workload == workload
            for s in m.samples
            if s.floor_s
        ]
        if floors:
            middle = sorted(floors)[len(floors) // 2]
            label = "floor" if w == 0 else None
            axis.plot([w - 0.45, w + 0.45], [middle] * 2, "--", color="grey", label=label)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_title(scenario)
    axis.set_ylabel("GB/s")
    axis.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
