"""vLLM as a verifier's engine: one vLLM request per session, drafts injected in its scheduler.

Life of a pass: the verifier's engine calls ``target.VllmTarget`` -> ``KnownText`` answers from what
vLLM has computed already, and determines the step that is missing for the rest (pure) -> one step
of vLLM's engine core (``core.py``), whose scheduler is ``scheduler.DraftScheduler`` -> the worker
chooses tokens by this project's sampling law (``worker.py``) -> again, until every request is
answered.

vLLM's own speculator, if the user names one (``speculation.py``), proposes behind each step. Its
proposals leave as ``PassResult.guesses``, and come back as drafts if the verifier wants them.

Only ``core.py``, ``scheduler.py`` and ``worker.py`` import vLLM, and only the versions in
``versions.py``: they use parts that are not its public interface.
"""
