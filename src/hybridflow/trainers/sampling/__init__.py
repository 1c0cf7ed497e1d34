"""From prompts to scored responses: generation as a whole or in parts, ahead of training or not, in rounds or not."""
