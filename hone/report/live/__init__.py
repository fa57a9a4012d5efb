"""The live page, `hone view`: reads run folders, before, during and after a run, and never writes to them."""
