"""Why a system takes no part, or not in a workload. Its message goes into the document as it stands."""


class Unavailable(Exception):
    """The system cannot be installed, converted or started here."""


class JobFailed(Exception):
    """The system did not do what a workload asked of it."""
