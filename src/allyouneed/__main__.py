from allyouneed.cli import main

main()
