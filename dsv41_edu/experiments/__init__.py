"""Small trainings and simulations; each writes one result file, which a chapter reads."""
