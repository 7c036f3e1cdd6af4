"""`onegraph check` and `onegraph rule`. Building the parser imports no torch; simulation does, when it runs."""

import argparse
import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable
from typing import Any

from onegraph.check import api
from onegraph.check.report import CheckError, Report
from onegraph.check.targets import Options, has_factory, split

DESCRIPTION = """\
Finds what breaks CUDA-graph capture of a step, or captures and then replays stale data.

A TARGET is path/to/file.py:factory or package.module:factory. factory() builds model and buffers on device "cuda" and
returns (step, inputs); step(*inputs(i)) is the i-th step. The source is read from the step on, and the step is
simulated on the CPU: no GPU is needed. For a folder or a file, sources alone are read. With --run, a program of your
own is run as it is, and what it captures is reported.
"""

EPILOG = """\
examples:
  onegraph check steps.py:decode
  onegraph check src/                                                 # reads sources alone
  onegraph check --run generate.py --batch 8
  onegraph check src/ --baseline known.json --write-baseline
  onegraph check steps.py:decode --fix --write

in the source, on the line or the one above it:  # onegraph: allow[CG101] the reason
--fix prints a unified diff and changes nothing; --fix --write changes the files. Both keep only what, checked and run
again, has the same results.
exit status: 0 without errors, 1 with errors, 2 the check could not run or found no step
"""


MOST_STEPS = 10_000
"""Each step's operations are kept until the end: 10,000 of a small step take some hundred megabytes."""


MOST_GPUS = 64

FORMATS = ("text", "json", "sarif", "github")


def add_parsers(subparsers: Any) -> None:
    """Add the commands `check` and `rule`; each sets `run`, called with the parsed arguments, which returns the exit
    status."""
    check = subparsers.add_parser(
        "check",
        help="find what breaks CUDA-graph capture, without a GPU",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "target", metavar="TARGET|DIR", nargs="*", help="file.py:factory, module:factory, a file, a folder"
    )
    ways = check.add_mutually_exclusive_group()
    ways.add_argument("--live", action="store_true", help="capture and replay on the GPU instead of simulating")
    ways.add_argument("--all", action="store_true", help="read, simulate, and capture on the GPU")
    check.add_argument(
        "--steps",
        type=int,
        default=4,
        metavar="N",
        help="steps to run, at least 3 [4, then up to 256 if these show no error]",
    )
    check.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of the simulated machine [1]")
    check.add_argument(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="maximum seconds per target, import and factory included [600]",
    )
    check.add_argument(
        "--select", default="", metavar="CODES", help="rules to report: codes, prefixes or names, e.g. CG1,CG205 [all]"
    )
    check.add_argument("--ignore", default="", metavar="CODES", help="rules to leave out, likewise [none]")
    check.add_argument("--strict", action="store_true", help="count warnings and unverified launches as errors")
    check.add_argument("--allow-no-steps", action="store_true", help="exit status 0 if no step is found [2]")
    check.add_argument("--baseline", metavar="FILE", help="hide findings that FILE lists")
    check.add_argument(
        "--write-baseline", action="store_true", help="write the present findings to the --baseline FILE"
    )
    check.add_argument(
        "--changed-since", metavar="REV", help="only findings on lines and in functions changed since this git revision"
    )
    form = check.add_mutually_exclusive_group()
    form.add_argument("--format", choices=FORMATS, default="text", help="format of the report [text]")
    for name, what in (("json", "JSON"), ("sarif", "SARIF 2.1.0")):
        form.add_argument(
            f"--{name}", dest="format", action="store_const", const=name, help=f"the same as --format {name}: {what}"
        )
    check.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    check.add_argument(
        "--fix", action="store_true", help="print mechanical rewrites as a diff; each is checked and run first"
    )
    check.add_argument("--write", action="store_true", help="with --fix: change the files")
    check.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        dest="run_program",
        metavar="PROGRAM",
        help="run `script.py args` or `-m module args` against the simulated machine, and report on what it captures; "
        "options of check go before it",
    )
    check.set_defaults(run=run_check)
    rule = subparsers.add_parser(
        "rule",
        help="explain a rule: what, why, example, use instead",
        description="Explains a rule of `onegraph check`, or lists all rules.",
        epilog="examples:\n  onegraph rule CG101\n  onegraph rule",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rule.add_argument("code", nargs="?", help="code or name, e.g. CG101 or device-value-read-on-host [list all]")
    rule.set_defaults(run=run_rule)


def run_check(args: argparse.Namespace) -> int:
    """Check each target, print, return 0, 1 or 2."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():  # a crash of the user's code names its line
        faulthandler.enable(sys.__stderr__, all_threads=False)
    if args.fix or args.write:
        return run_fix(args)
    return run_with(look, args)


def run_with(make: Callable[[argparse.Namespace], Report], args: argparse.Namespace) -> int:
    """Tell the report that `make` gives in the form that was asked for; return 0, 1 or 2."""
    try:
        select, ignore = api.codes(args.select, "--select"), api.codes(args.ignore, "--ignore")
        narrow = narrowing(args)
        check_written("--html", args.html)
        if not 3 <= args.steps <= MOST_STEPS:
            raise CheckError(
                f"--steps: got {args.steps}, allowed 3 to {MOST_STEPS}; replay must be compared on several inputs"
            )
        if not 1 <= getattr(args, "gpus", 1) <= MOST_GPUS:
            raise CheckError(f"--gpus: got {args.gpus}, allowed 1 to {MOST_GPUS}")
        if not 0.1 <= args.timeout <= 86400:
            raise CheckError(f"--timeout: got {args.timeout:g}, allowed 0.1 to 86400 seconds")
        with contextlib.redirect_stdout(sys.stderr):  # what the user's own code prints is no part of the report
            report = make(args)
        for line in report.facts.get("unread", ()):
            print(f"onegraph: not read: {line}", file=sys.stderr)
        if report.facts.get("steps found") == 0 and report.steps == 0 and not args.allow_no_steps:
            raise CheckError(
                f"{report.target}: 0 steps found: nothing captures, no forward of a module, and nothing in functions "
                "named as steps is known to be a tensor (annotate `x: torch.Tensor`); "
                "name the step as file.py:factory, or say --allow-no-steps"
            )
        found = len(report.counted)
        report = narrow(report.select(select, ignore))
        if left := found - len(report.counted):
            report.facts["left out"] = left
        if args.html:
            from onegraph.check.output import html

            write(args.html, html.render(report))
    except CheckError as error:
        message = " ".join(str(error).split())
        print("onegraph: error: " + message, file=sys.stderr)
        print_failure(message, args)
        return 2
    print_report(report, args)
    if report.incomplete:
        sys.stdout.flush()
        for why in report.incomplete:
            print(f"onegraph: error: {' '.join(why.split())}", file=sys.stderr)
        return 2
    return 0 if args.write_baseline else report.exit_code(strict=args.strict)


def narrowing(args: argparse.Namespace) -> Callable[[Report], Report]:
    """What --baseline, --write-baseline and --changed-since leave of a report. Raises CheckError, before anything is
    checked, where one of them cannot work."""
    if args.write_baseline and not args.baseline:
        raise CheckError("--write-baseline: needs the file, --baseline FILE")
    if args.write_baseline and args.changed_since:
        raise CheckError("--write-baseline and --changed-since: a baseline is of everything; give one of the two")
    if args.write_baseline:
        check_written("--baseline", args.baseline)
    from onegraph.check import baseline

    known = baseline.load(args.baseline) if args.baseline and not args.write_baseline else None
    changes = None
    if args.changed_since:
        from onegraph.check.changed import Changes

        with contextlib.redirect_stdout(sys.stderr):  # finding a module imports the packages around it
            changes = Changes(args.changed_since, [f for t in asked(args) if (f := folder_of(t))])

    def narrow(report: Report) -> Report:
        if args.write_baseline and not report.incomplete:  # what was not looked at would be missing
            write(args.baseline, baseline.dump(report, args.baseline))
            remark(f"{len(report.findings)} findings written to {args.baseline}")
        if known is not None:
            whole = [t for t in args.target if os.path.exists(t)] if changes is None and not narrowed(args) else ()
            gone = known.stale(report, whole) if not narrowed(args) else []
            report, count = known.without_known(report)
            remark(f"{count} findings are known in {args.baseline}" if count else "")
            for path, code, source in gone:
                remark(f"{args.baseline}: {code} in {path} is found no longer: {source!r}; drop it by --write-baseline")
        if changes is not None:
            report, count = changes.select(report)
            remark(f"{count} findings are on lines unchanged since {args.changed_since}" if count else "")
        return report

    return narrow


def asked(args: argparse.Namespace) -> list[str]:
    """The targets, or the program to be run; the working directory where neither is given (--vllm)."""
    return list(args.target) or (args.run_program or [])[:1] or [os.curdir]


def folder_of(target: str) -> str:
    """The folder that holds a target's own code, the working directory for a module to be run; "" where there is none:
    the check itself says so. Raises CheckError where the target's file or module cannot be found."""
    if target == "-m":
        return os.curdir
    if os.path.isdir(target):
        return target
    if has_factory(target):
        target, _ = split(target)
    return os.path.dirname(os.path.realpath(target)) if os.path.isfile(target) else ""


def narrowed(args: argparse.Namespace) -> bool:
    """Whether only some rules were asked for: then nothing can be said about findings of the others."""
    return bool(args.select or args.ignore)


def remark(text: str) -> None:
    if text:
        print(f"onegraph: {text}", file=sys.stderr)


def print_failure(message: str, args: argparse.Namespace) -> None:
    """Tell machines, in the form that was asked for, that the check could not run."""
    if args.format == "sarif":
        from onegraph.check.output import sarif

        print(sarif.failure(message, ", ".join(args.target)))
    elif args.format == "github":
        from onegraph.check.output import github

        print(github.failure(message), end="")


def run_fix(args: argparse.Namespace) -> int:
    """Show, or write, what has a mechanical fix; the status is that of the files as they are then."""
    from onegraph.check.rewrite import RewritePlan, plan

    try:
        others = {"html": "html", "live": "live", "all": "all", "select": "select", "ignore": "ignore"}
        others |= {"baseline": "baseline", "changed-since": "changed_since", "run": "run_program"}
        unfit = [args.format] if args.format != "text" else [o for o, name in others.items() if getattr(args, name)]
        if unfit or not args.fix:
            why = f"--{unfit[0]} does not go with --fix" if unfit else "--write needs --fix"
            raise CheckError(f"{why}; allowed --fix and --fix --write, with --steps, --gpus, --timeout and --strict")
        if not args.target:
            raise CheckError("check: got no target, allowed file.py:factory, module:factory or a file")
        status = 0
        for target in args.target:
            made: RewritePlan = plan(target, options_of(args))
            print(made.diff(), end="")
            if args.write:
                made.write()
            for line in made.told(written=args.write):
                print(f"onegraph: {line}", file=sys.stderr)
            status |= made.exit_code(written=args.write, strict=args.strict)
    except CheckError as error:
        print("onegraph: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    return status


def look(args: argparse.Namespace) -> Report:
    """The report of all targets, or of the program to be run. Raises CheckError."""
    options = options_of(args)
    if args.run_program is None:
        if not args.target:
            raise CheckError("check: got no target, allowed file.py:factory, module:factory or a folder")
        return api.check_targets(args.target, options)
    if args.target:
        raise CheckError(f"--run and the target {args.target[0]!r}: give one of the two")
    if options.live:
        raise CheckError("--run simulates; on a GPU, name the step: onegraph check --live file.py:factory")
    return api.check_program(args.run_program, options)


def options_of(args: argparse.Namespace) -> Options:
    """What the words on the command line ask for."""
    return Options(
        simulate=not args.live, live=args.live or args.all, steps=args.steps, gpus=args.gpus, timeout_s=args.timeout
    )


def print_report(report: Report, args: argparse.Namespace) -> None:
    """Print in the form that was asked for."""
    if args.format == "json":
        print(report.to_json())
    elif args.format == "sarif":
        from onegraph.check.output import sarif

        print(sarif.render(report, strict=args.strict))
    elif args.format == "github":
        from onegraph.check.output import github

        print(github.render(report), end="")
    else:
        from onegraph.check.output import text

        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(text.render(report, color=color), end="")


def check_written(option: str, path: str | None) -> None:
    """Raises CheckError where the file of an option cannot be written: now, not after all steps."""
    if not path:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise CheckError(f"{option} {path}: {folder} is no folder; make it, or give another file")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise CheckError(f"{option} {path}: cannot be written; give another file")


def write(path: str, text: str) -> None:
    """Write a file. Raises CheckError."""
    try:
        with open(path, "w", encoding="utf-8") as handle:
            handle.write(text)
    except OSError as error:
        raise CheckError(f"{path}: {error.strerror or error}") from None


def run_rule(args: argparse.Namespace) -> int:
    """Print a rule's page, or the table of all rules."""
    from onegraph.check.rules import RULES, find

    if args.code is None:
        for code, rule in RULES.items():
            print(f"{code}  {rule.name:32} {rule.severity}")
        return 0
    try:
        print(find(args.code).explain(), end="")
    except ValueError as error:
        print(f"onegraph: error: rule: {error}", file=sys.stderr)
        return 2
    return 0
