"""`make demo-agent`: a small model with random weights learns, on Ray with two ranks, within an agent of a library.

random weights --SFT--> warm start: mostly answers a product at once --GRPO of the agent--> calls its calculator

The agent is `calculator_agent.py`: the OpenAI Agents SDK, which knows nothing of training, asks the model at the
address of the episode.
"""

from calculator_agent import multiply
from tools_demo import at_both_ends, conclude, console, learn, make_everything, parser_of, warm_start


def main() -> None:
    args = parser_of(__doc__).parse_args()
    function = {"name": multiply.name, "description": multiply.description, "parameters": multiply.params_json_schema}
    make_everything([{"type": "function", "function": function}], args.conversations)
    warm_start(args.sft)
    rows, seconds = learn("tools_agent", args.grpo)
    start, end = at_both_ends(rows, "critic/score/mean")
    console.print(f"reward of the agent: {start:.3f} -> {end:.3f} in {rows[-1]['step']} steps, {seconds:.0f} s")
    conclude("demo-agent", rows, args.grpo)


if __name__ == "__main__":
    main()
