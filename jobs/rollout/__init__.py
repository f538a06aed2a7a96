"""The rollouts job: packed samples -> sampled answers with log-probabilities and rewards (`schemas.rollouts`)."""
