"""The policy laboratory: which drafting policy is best for a model and its prompts?"""
