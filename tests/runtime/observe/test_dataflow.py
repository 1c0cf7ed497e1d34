from xml.etree import ElementTree

from hybridflow.runtime.observe import TraceEvent, dataflow_edges, draw_mermaid, draw_svg, draw_text


def event(kind, where, **sources):
    named = tuple((producer.replace("_", "."), columns) for producer, columns in sources.items())
    return TraceEvent(kind, where, f"{where}/0", "", 0.0, 0.0, sources=named)


EVENTS = [
    event("send", "Actor.gen", controller=("prompts",)),
    event("call", "Actor.gen", controller=("prompts",)),
    event("call", "Reward.score", Actor_gen=("text", "mask")),
    event("call", "Reward.score", Actor_gen=("text", "mask")),  # another rank
    event("read", "Reward.score", Reward_score=("scores",)),
    event("read", "", controller=("kept",)),
]


def test_edges_are_unique_triples_of_producer_reader_and_column():
    assert dataflow_edges(EVENTS) == [
        ("controller", "Actor.gen", "prompts"),
        ("Actor.gen", "Reward.score", "text"),
        ("Actor.gen", "Reward.score", "mask"),
        ("Reward.score", "controller", "scores"),
    ]


def test_drawings_show_every_reader_with_its_sources():
    edges = dataflow_edges(EVENTS)
    assert draw_text(edges, {"Actor.gen": "pool main"}) == (
        "Actor.gen  (pool main)\n    <- controller: prompts\n"
        "Reward.score\n    <- Actor.gen: mask, text\n"
        "controller\n    <- Reward.score: scores\n"
    )
    nodes, arrows = draw_mermaid(edges).splitlines()[:4], draw_mermaid(edges).splitlines()[4:]
    assert nodes == ["flowchart TD", '    n0["controller"]', '    n1["Actor.gen"]', '    n2["Reward.score"]']
    assert arrows == ['    n2 -->|"scores"| n0', '    n0 -->|"prompts"| n1', '    n1 -->|"mask, text"| n2']


def test_a_picture_names_all_columns_and_escapes_what_it_shows():
    edges = [*dataflow_edges(EVENTS), *(("Actor.gen", "Reward.score", f"<column_{number}>") for number in range(20))]
    texts = [text.text for text in ElementTree.fromstring(draw_svg(edges, {"Actor.gen": "a & b"})).iter() if text.text]
    assert {"controller", "Actor.gen", "Reward.score", "a & b", "prompts", "scores"} <= set(texts)
    assert {name.strip() for text in texts for name in text.split(",")} >= {column for _, _, column in edges}
