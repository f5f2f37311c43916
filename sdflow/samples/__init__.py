"""The small trained pipeline that ships with the project: its images, prompts and score."""
