"""`quire chat [MODEL]`: a conversation in the terminal, with a local model or a server's.

Ctrl-C ends an answer, not the chat. Each line of piped input is one turn. Answers go to standard
output, all other text to standard error.
"""

import argparse
import os

from quire.base.errors import ConfigError
from quire.cli.chat.conversation import Conversation, Image
from quire.cli.chat.session import Chat
from quire.cli.chat_targets import ChatTarget, ModelTarget, ServerTarget
from quire.cli.model_files import check_input
from quire.cli.options.help_parser import Commands
from quire.cli.sampling import add_sampling, given_sampling, sampling_params
from quire.cli.settings import FLAG, add_settings, given_settings
from quire.ops.host.torch_import import declare_own_process
from quire.render.templates.template_pool import prestart


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "chat",
        usage="quire chat [MODEL] [option ...]",
        help="chat with a model in the terminal",
        description="Chat with MODEL (by default the demo model), or with the model of a server.",
    )
    parser.set_defaults(run=run)
    add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument(
        "--image", action="append", default=[], metavar="PATH",
        help="image that is sent with the first message; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--url", help="server to chat with, such as http://127.0.0.1:8000, instead of a local model"
    )
    parser.add_argument(
        "--api-key", dest="server_key", metavar="TEXT",
        help="API key for the server (default: OPENAI_API_KEY of the environment)",
    )  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="print answers without Markdown")
    add_settings(parser, model_first=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 if a piped turn got no answer."""
    if arguments.server_key and not arguments.url:
        raise ConfigError("--api-key is for a server; add --url with the address of the server.")
    images = [Image.read(path) for path in arguments.image]
    target = _target(arguments)
    try:
        return Chat(
            target,
            Conversation(arguments.system),
            arguments.max_tokens,
            images,
            given_sampling(arguments),
            arguments.plain,
        ).run()
    finally:
        target.close()


def _target(arguments: argparse.Namespace) -> ChatTarget:
    settings = given_settings(arguments)
    if arguments.url:
        key = arguments.server_key or os.environ.get("OPENAI_API_KEY")
        model = settings.pop("model", None)
        flags = [name for name in settings if arguments.settings[name].origin == FLAG]
        if flags:
            raise ConfigError(
                f"{_listed(flags)} cannot be used with --url: the server has its own engine; remove"
                f" {'it' if len(flags) == 1 else 'them'}."
            )
        return ServerTarget(arguments.url, key, model, given_sampling(arguments))
    declare_own_process()
    check_input(arguments, is_chat=True)
    prestart()
    from quire.serve.python.llm import LLM

    llm = LLM(**({"max_num_seqs": 1} | settings))
    try:
        return ModelTarget(llm, sampling_params(arguments, llm.get_default_sampling_params()))
    except BaseException:
        llm.close()
        raise


def _listed(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
