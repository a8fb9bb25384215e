"""The table of `device_check.py`: microseconds of one step, and ratios."""

MOST_LETTERS = 300  # of a reason


def table(results):
    """Return a row for each workload, then one for each of its kernels and ways to call."""
    measured = [r["figures"] for r in results if r["figures"].get("seconds")]
    if not measured:
        return "nothing was timed"
    peers = [who for f in measured for who in f["seconds"] if who not in ("simple", "split")]
    peers = list(dict.fromkeys(peers))
    rows = [["us", "pools", "split", "GB/s", "of copy", "simple", *peers, "timed by"]]
    rows += [_row(figures, peers) for figures in measured]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join(lines + [text for figures in measured for text in _details(figures)])


def _row(figures, peers):
    seconds, copy = figures["seconds"], figures.get("copy_bytes_per_s")
    rate = figures["kv_bytes"] / seconds["split"] if "split" in seconds else None
    how = {said.partition(":")[0] for said in figures["how"].values()}
    return [
        figures["workload"],
        str(figures["pools"]),
        _us(seconds.get("split")),
        f"{rate / 1e9:.0f}" if rate else "-",
        f"{rate / copy:.2f}" if rate and copy else "-",
        _us(seconds.get("simple")),
        *(_us(seconds.get(who)) for who in peers),
        ", ".join(sorted(how)),
    ]


def _details(figures):
    if copy := figures.get("copy_bytes_per_s"):
        yield f"{figures['workload']} copy: {copy / 1e9:.0f} GB/s, read and written"
    kernels = (
        f"{name} {_us(k['device'])} (host {_us(k['host_per_launch'])})"
        for name, k in figures.get("kernels", {}).items()
    )
    yield f"{figures['workload']} kernels: " + ", ".join(kernels)
    calls = (
        f"{name} {_us(k['whole'])}, of which to issue {_us(k['issue'])}"
        for name, k in figures.get("calls", {}).items()
    )
    yield f"{figures['workload']} calls: " + "; ".join(calls)
    for who, said in figures["how"].items():
        if said != "graph":
            yield f"{figures['workload']} {who} timed by {said}"[:MOST_LETTERS]


def _us(seconds):
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
