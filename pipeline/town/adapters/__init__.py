"""The town behind the interfaces of other libraries; each module needs its library installed."""
