"""The laboratory: experiments and measurements on top of the library's public names."""
