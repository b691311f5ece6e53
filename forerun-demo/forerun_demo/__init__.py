"""The files of forerun's demo models; `forerun.demo` finds them here."""
