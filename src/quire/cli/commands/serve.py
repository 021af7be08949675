"""`quire serve [MODEL]`: the OpenAI-compatible HTTP server. This process imports neither torch nor
FastAPI; its child processes do."""

import argparse
import dataclasses
import os
import sys
from typing import Any

from quire.base.errors import ConfigError, ModelError
from quire.base.settings.config import EngineConfig, ServerConfig
from quire.base.settings.secrets import KEY_VARIABLES
from quire.cli.options.help_parser import Commands
from quire.cli.served_models import served_models
from quire.cli.settings import (
    SERVER,
    add_settings,
    check_several,
    given_for_all,
    given_server_settings,
)
from quire.serve.several.served import check_together


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        usage="quire serve [MODEL ...] [option ...]",
        help="serve models over an OpenAI-compatible HTTP API",
        description="Serve one MODEL or several over an HTTP API that is compatible with OpenAI's."
        " The default is the demo model.",
    )
    parser.set_defaults(run=run)
    add_settings(parser, *SERVER, several_models=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the server until it ends, and return the exit status."""
    from quire.cli.model_files import may_quantise
    from quire.serve.supervisor import serve, serve_several

    check_several(arguments.settings)
    given = given_for_all(arguments)
    server = ServerConfig(**(keys_of_environment() | given_server_settings(arguments)))
    models = served_models(arguments.settings.get("models"), given, server)
    if len(models) == 1 and may_quantise(models[0].engine):
        _check_certificate(server)  # before a download
        models = [dataclasses.replace(models[0], engine=_fitting(models[0].engine))]
    if len(models) > 1 or server.idle_unload_s:
        check_together(models, server)
        _check_certificate(server)
        return serve_several(models, server, arguments.log_level)
    server = dataclasses.replace(server, served_model_name=models[0].names)
    engine = models[0].engine
    if engine.parallel.node_rank > 0:
        from quire.engine.ranks.launch import cuda_devices
        from quire.engine.ranks.node import ranks_of_node, serve_node

        devices = cuda_devices(engine, len(ranks_of_node(engine.parallel)))
        settings = given | {"model": engine.model.model}
        return serve_node(engine, devices, settings, server.restart_engine)
    _check_certificate(server)
    return serve(engine, server, arguments.log_level)


def _fitting(engine: EngineConfig) -> EngineConfig:
    """Return the settings with a quantization if the model needs one to fit, and print it."""
    from quire.cli.model_files import fitting_quantization, quantization_notice
    from quire.models.checkpoint.source import resolve_source

    try:
        source = resolve_source(engine.model)
        quantization = fitting_quantization(engine, source)
    except ModelError:  # the server reports it, after the checks of its own settings
        return engine
    if quantization is None:
        return engine
    print(quantization_notice(quantization, source), file=sys.stderr, flush=True)
    model = dataclasses.replace(engine.model, quantization=quantization)
    return dataclasses.replace(engine, model=model)


def keys_of_environment() -> dict[str, Any]:
    """Return the API key of the environment. Other users can see flags, but not the environment."""
    for name in KEY_VARIABLES:
        if key := os.environ.get(name):
            return {"api_key": (key,)}
    return {}


def _check_certificate(server: ServerConfig) -> None:
    """Check the files for HTTPS before a model is loaded. Raises ConfigError."""
    if server.ssl_certfile is None:
        return
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password="")
    except OSError as error:  # includes SSLError
        raise ConfigError(
            f"ssl_certfile={server.ssl_certfile!r} and ssl_keyfile={server.ssl_keyfile!r} cannot be"
            f" used ({error.strerror or error}); give a certificate and its key, without a"
            " password, in PEM files."
        ) from error
