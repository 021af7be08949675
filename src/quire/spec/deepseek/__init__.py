"""Options of DeepSeek's models and their relatives: latent attention, and the choice of experts."""
