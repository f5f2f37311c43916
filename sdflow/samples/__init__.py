"""The small trained pipeline that ships with the project: its images, its prompts and a measure of its meaning."""
