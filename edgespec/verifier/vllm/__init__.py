"""vLLM as a verifier's engine: one request of vLLM's a session, drafts injected in its scheduler.

Life of a pass: the verifier's engine asks ``target.VllmTarget`` for it -> ``KnownText`` answers
what vLLM has said already and says what it should look at for the rest (pure) -> one step of
vLLM's engine core (``core.py``), whose scheduler is ``scheduler.DraftScheduler`` -> the worker
chooses tokens by this project's own law (``worker.py``) -> again, until every request is answered.

vLLM's own speculator, where the user names one (``core.py``), proposes behind each step; its
proposals leave as ``PassResult.guesses``, and come back as drafts if the verifier wants them.

Only ``core.py``, ``scheduler.py`` and ``worker.py`` know vLLM, exactly ``loading.VERSION`` of it:
what they use is not its public interface.
"""
