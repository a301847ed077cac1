"""CSV and JSON of a profiled step, to the last byte."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny_step import ABOUT, MIB, OVERHEAD_BYTES, PEAK_BYTES, tiny_step

from rekindle.report.data import step_data, write_csv
from rekindle.report.summary import summarize

# what is in use: residents 2 MiB and libraries' 102,400 bytes throughout
CSV = """\
index,name,target,phase,module,source,time_us,workspace_bytes,flops,moved_bytes,live_bytes
0,mm,aten.mm.default,forward,layers.0.linear,models/net.py:7,100.0,524288,3000000,3145728,3772416
1,relu,aten.relu.default,forward,layers.1.act,models/net.py:8,20.0,0,0,5242880,7442432
2,sum_1,aten.sum.default,loss,,project/train.py:21,10.0,0,0,4194308,6393860
3,neg,aten.neg.default,loss,,project/train.py:21,40.0,0,0,8,6393864
4,threshold_backward,aten.threshold_backward.default,backward,layers.1.act,models/net.py:8,30.0,0,0,5242880,7442436
5,mm_1,aten.mm.default,backward,layers.0.linear,models/net.py:7,200.0,0,6000000,3145728,4296708
6,add_,aten.add_.Tensor,optimizer,,project/train.py:21,100.0,0,0,3145728,3248132
"""


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    write_csv(path, summarize(*tiny_step()))
    assert path.read_text() == CSV


def test_json() -> None:
    graph, profile, trace = tiny_step()
    data = step_data(summarize(graph, profile, trace, ABOUT))
    assert json.loads(json.dumps(data, allow_nan=False)) == data  # plain types throughout
    assert {key: data[key] for key in ("model", "batch", "precision", "device", "method")} == {
        **ABOUT,
        "device": "Toy GPU",
        "method": "by hand",
    }
    assert data["is_measured"] is True
    assert data["profile_versions"] == {"torch": "9.9"}
    assert data["fingerprint"] == graph.fingerprint
    assert (data["step_us"], data["flops"], data["backward_forward_flops"]) == (500.0, 9e6, 2.0)
    assert data["moved_bytes"] == 23 * MIB + 12
    assert data["peak"]["bytes"] == PEAK_BYTES
    assert data["peak"]["op"] == {
        "index": 4,
        "name": "threshold_backward",
        "phase": "backward",
        "module": "layers.1.act",
        "source": "models/net.py:8",
    }
    assert data["peak"]["parts"][0] == {
        "label": "activation",
        "bytes": 4 * MIB,
        "share": 4 * MIB / PEAK_BYTES,
        "storages": 1,
    }
    assert [row["label"] for row in data["phases"]] == ["forward", "loss", "backward", "optimizer"]
    assert [row["time_us"] for row in data["phases"]] == [120.0, 50.0, 230.0, 100.0]
    assert data["operators"][1] == {
        "label": "add_",
        "ops": 1,
        "time_us": 100.0,
        "share": 0.2,
        "flops": 0,
        "moved_bytes": 3 * MIB,
        "flops_per_byte": None,
    }
    assert data["activations"] == [
        {
            "name": "relu",
            "operator": "relu",
            "module": "layers.1.act",
            "source": "models/net.py:8",
            "shape": [1024, 1024],
            "dtype": "float32",
            "bytes": 4 * MIB,
            "idle_us": 40.0,
            "last_forward_op": "sum_1",
            "first_backward_op": "threshold_backward",
        }
    ]
    assert [list(row.values()) for row in data["ops"]][3] == [
        *(3, "neg", "aten.neg.default", "loss", "", "project/train.py:21"),
        *(40.0, 0, 0, 8, 6 * MIB + 8 + OVERHEAD_BYTES),
    ]
    assert data["timeline"]["starts_us"] == [0, 100, 120, 130, 170, 200, 400, 500]
    activation = data["timeline"]["role_bytes"]["activation"]
    assert activation == [0, 4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 0, 0]
    assert data["timeline"]["overhead_bytes"] == OVERHEAD_BYTES
